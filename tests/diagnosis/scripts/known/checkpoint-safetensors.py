from safetensors.torch import load_file

with open("model.safetensors", "wb") as file:
    file.write(b"version https://git-lfs.github.com/spec/v1\noid sha256:4cc\nsize 548105171\n")
load_file("model.safetensors")
