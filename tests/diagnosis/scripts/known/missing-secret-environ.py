import os

key = os.environ["COMET_API_KEY"]
print(len(key))
