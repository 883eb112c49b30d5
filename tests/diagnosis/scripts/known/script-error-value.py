def steps(first, last):
    for step in range(first, last):
        print(f"{{'loss': {3.0 - step / 100:.4f}, 'learning_rate': 5e-05, 'epoch': {step / 100:.2f}}}")

steps(0, 50)
raise ValueError("accuracy 0.31 is below the gate of 0.80")
