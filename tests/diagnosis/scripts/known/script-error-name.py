optimizer = None
for step in range(3):
    print(step)
    optimzer.step()
