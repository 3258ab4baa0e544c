"""DeepSpeed scripts that run unchanged under the drop-in, in a plain loop, and under DeepSpeed.

A script is a function of a `Run`, which gives it a package to call `deepspeed`, a ZeRO stage, and data. It
trains as a user's script does, and reports with `run.tell` the values that must be equal under every package.
The tests compare the drop-in with plain torch in fp32 (`plain.py`), at every stage, on one rank and on two,
and where DeepSpeed is installed the drop-in with that. Where DeepSpeed does otherwise at some stages,
`Script.alike` names those at which it does as plain torch does, and `why` what it does elsewhere.

To add one: write the function in the file of its kind, with one line that says what people do, and put a
`Script` of it into the `SCRIPTS` at the file's end.

To run one: `pytest tests/dropin -k a_bias_that_is_returned`.
"""
