"""Scripts as people write them: plain torch and the engine run each one, and must give the same results.

A habit is a function of a `Loop` and independent of the trainer: it builds a model, hands it to `loop.train`,
and trains as a user's script does. The test runs it twice on every rank. The first time `loop.train` gives a
plain torch loop (`plain.py`), whose gradients are averaged over the ranks by hand; the second time it gives
an engine. The test compares, bit for bit unless the habit has a tolerance and a reason,

- the loss of every backward, and every value that the habit records with `loop.see(name, value)`;
- the norm of the gradient of every step (to 1e-6: plain torch sums squares in another order);
- masters and buffers by name at the end, and torch's random state.

In bf16 the plain loop keeps fp32 masters, which the optimizer updates, and the model sees them rounded.

Habits in the files `script_*.py` are scripts of DeepSpeed: they call the package `loop.deepspeed`, or their
trainer by the names of DeepSpeed's engine. They run in fp32 under the drop-in, at every stage, on one rank
and on two, and where DeepSpeed is installed under that too. Where DeepSpeed does otherwise at some stages,
`Habit.alike` names those at which it does as plain torch does, and `why` what it does elsewhere.

To add one: write a function of a loop alone in the file of its kind, with a line about the practice;
`habits_of` finds it. A loss of a model has `@as_loss_of(model)`, and scripts that differ in a detail are one
function with a table (`each`). A model takes `loop.data(...)`, which differs by rank and is in the mode's
dtype already. Where an engine cannot run a habit correctly, `refused` has words of the error that must be
raised on every rank, at every stage, and the reason. A habit that hangs, kills its rank or raises anything
else has failed.

To run one: `pytest tests/habits -k a_list_that_blocks_append_to`.
"""
