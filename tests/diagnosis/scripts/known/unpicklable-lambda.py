import torch


def main():
    rows = torch.utils.data.TensorDataset(torch.arange(8))
    collate = lambda batch: batch
    loader = torch.utils.data.DataLoader(rows, num_workers=1, collate_fn=collate, multiprocessing_context="spawn")
    print(len(list(loader)))


if __name__ == "__main__":
    main()
