print("loading"
for step in range(3):
    pass
