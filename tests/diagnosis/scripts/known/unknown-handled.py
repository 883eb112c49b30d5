import logging
import sys

logging.basicConfig(level=logging.INFO)
try:
    import apex_fused
except ImportError:
    logging.warning("apex_fused is not available, using torch's own", exc_info=True)
try:
    open("cache/tokens.bin")
except FileNotFoundError:
    logging.info("no cache yet, building it", exc_info=True)
print("epoch 1 of 3: loss 2.31")
print("epoch 2 of 3: loss 1.97")
sys.exit(9)
