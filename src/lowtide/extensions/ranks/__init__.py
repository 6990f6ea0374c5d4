"""Models of which other ranks hold a part: sharded ones, replicas, stages of a pipeline.

`ranks.py`      what ranks exchange, and when: the extension
`agreement.py`  how, and which ranks these are
`sharded.py`    the limit of a model that FSDP may shard
`pipeline.py`   the limit of a pipeline's schedule
`context.py`    steps inside of PyTorch's own context parallelism
"""
