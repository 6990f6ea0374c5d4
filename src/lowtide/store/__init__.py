"""Where saved bytes live between forward and backward: host, disk, codecs, arenas. Nothing here knows of
plans or graphs.
"""
