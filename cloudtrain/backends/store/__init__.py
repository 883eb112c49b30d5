"""Files of a run at a URI: a folder, an S3 or a Cloud Storage bucket, behind one interface (files.py)."""
