"""For authors of backends and for tests: the contract suite and a backend that keeps everything in memory."""
