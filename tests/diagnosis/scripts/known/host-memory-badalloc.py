import ctypes

library = ctypes.CDLL("libstdc++.so.6")
new = library._Znwm
new.argtypes = [ctypes.c_size_t]
new.restype = ctypes.c_void_p
print("building the index", flush=True)
new(2**62)
