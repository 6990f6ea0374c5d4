"""What one card answers in under ten minutes: ``make gpu``.

`rows` says what a row is, `parts` lists them, most important first. `runner` lets each part run in a process
of its own (`child`), takes down every row when it is known, and goes on after what fails. `table` shows what
came out.
"""
