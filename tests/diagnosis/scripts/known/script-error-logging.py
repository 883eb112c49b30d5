import logging

handler = logging.FileHandler("/dev/full")
logging.getLogger().addHandler(handler)
logging.getLogger().warning("step 1 done")
print(100 / 0)
