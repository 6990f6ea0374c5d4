"""Callbacks for trainers of other libraries. `import lowtide` imports none of them.

In: a trainer and a budget. Out: limited training, with peaks in the trainer's logs.

- `lowtide.integrations.hugging_face`: a callback for the ``Trainer`` of transformers, and of TRL.
- `lowtide.integrations.lightning`: a callback for Lightning's ``Trainer``.

accelerate, peft and plain loops need no callback: `lowtide.limit_memory` finds the model in their wrappers.
"""
