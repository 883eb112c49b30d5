"""HTTP servers on loopback that stand for clouds and really execute jobs: local modes use them, and tests."""
