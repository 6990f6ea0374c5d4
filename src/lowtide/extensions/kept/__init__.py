"""Plans that survive a restart: what a process has planned is kept in a folder, and used there by the next.

`kept.py`  reads and writes them: the extension
`file.py`  the format
"""
