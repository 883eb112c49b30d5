import os


def nobody():
    """Root may read everything: be someone else."""
    if os.geteuid() == 0:
        os.seteuid(65534)



os.mkdir("outputs")
os.chmod("outputs", 0o500)
nobody()
try:
    os.makedirs("outputs/run-3")
finally:
    if os.getuid() == 0:
        os.seteuid(0)
