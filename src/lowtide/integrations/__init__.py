"""A line each for the trainers that people use. Nothing here is imported before it is asked for.

In: a trainer of others and a budget. Out: its training, limited, with the peaks in its logs.

- `lowtide.integrations.hugging_face`: a callback for the ``Trainer`` of transformers, and of TRL.
- `lowtide.integrations.lightning`: a callback for Lightning's ``Trainer``.

accelerate, peft and plain loops need nothing: `lowtide.limit_memory` sees through what they wrap.
"""
