try:
    import simdjson_fast as json_library
except ImportError:
    import orjson_fast as json_library

print(json_library)
