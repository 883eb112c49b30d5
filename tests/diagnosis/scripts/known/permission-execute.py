import subprocess

subprocess.run(["./prepare.sh", "--shards", "8"], check=True)
