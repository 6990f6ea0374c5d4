"""A line each for the trainers that people use. Nothing here is imported before it is asked for.

- `lowtide.integrations.hugging_face`: a callback for the ``Trainer`` of transformers, and of TRL.
- `lowtide.integrations.lightning`: a callback for Lightning's ``Trainer``.

accelerate, peft and plain loops need nothing: `lowtide.limit_memory` sees through what they wrap.
"""
