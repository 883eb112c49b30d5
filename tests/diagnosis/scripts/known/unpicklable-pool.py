import multiprocessing
import threading


class Tokenizer:
    def __init__(self):
        self.lock = threading.Lock()

    def encode(self, text):
        return text.split()


def main():
    with multiprocessing.Pool(1) as pool:
        print(pool.map(Tokenizer().encode, ["a b", "c"]))


if __name__ == "__main__":
    main()
