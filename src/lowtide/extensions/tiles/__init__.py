"""Modules that run piece by piece over the tokens: `lowtide.tile`, and the tiles that a limit chooses.

In: a module that treats each token alone, and a number of pieces. Out: the same gradients up to rounding;
what is made inside the module is there for one piece at a time. Begin with `tile.py`.

`loss.py` is `lowtide.chunked_loss`. The output layer returns a stand-in for the logits (`stand_in.py`), and
the loss reads numbers off a piece of them at a time (`rows.py`), which products make (`products.py`).
"""
