import model

print(model)
