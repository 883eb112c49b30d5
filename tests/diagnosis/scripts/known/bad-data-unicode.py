with open("corpus.txt", "wb") as file:
    file.write(b"hello \xff\xfe")
print(open("corpus.txt", encoding="utf-8").read())
