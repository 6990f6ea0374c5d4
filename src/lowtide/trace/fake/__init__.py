"""Trace a step that cannot run here, on tensors without memory.

Comes in: a callable that ends in a loss, and the modules that it uses. Goes out: a `StepGraph`. What
is planned from it is a forecast: ``lowtide plan``, ``lowtide simulate``, what an optimizer will need. Nothing
of the user's runs on fake tensors under `limit_memory`.
"""
