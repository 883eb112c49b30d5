import os


def nobody():
    """Root may read everything: be someone else."""
    if os.geteuid() == 0:
        os.seteuid(65534)



with open("token.bin", "wb") as file:
    file.write(b"1234")
os.chmod("token.bin", 0)
nobody()
try:
    open("token.bin", "rb")
finally:
    if os.getuid() == 0:
        os.seteuid(0)
