import multiprocessing


def read(file, row):
    return file.read(row)


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with open("train.py", "rb") as file:
        worker = context.Process(target=read, args=(file, 1))
        worker.start()
