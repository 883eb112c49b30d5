"""An organisation's rules for jobs (policy.toml): read, applied at plan, checked before each attempt, written for the platform.

files.py    parse policy.toml
apply.py    which ones hold for a job; applied while it is planned, checked again before it is sent
pin.py      fetch an organisation's policy and keep a copy (`cloudtrain doctor`)
checks.py   what a plan breaks; pure
changes.py  what a policy sets in a job, and the entry points `cloudtrain.policies`
enforce.py  what the platform enforces, for `cloudtrain permissions`; written by each backend
"""
