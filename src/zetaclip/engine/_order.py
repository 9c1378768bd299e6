"""Errors of order: a call came too early, too late, or from the wrong process."""

from __future__ import annotations


class OrderError(RuntimeError):
    """The loop, the module or the optimizer did something out of order; nothing was released."""


# One draw of noise on two different sums cancels by subtraction.
FORKED = (
    "this process is a fork of the one that owns the private run, and both would draw the same "
    "noise and the same batches. Call make_private in each process, or load a checkpoint there "
    "(engine.load(path) takes fresh streams)"
)
DETACHED = (
    "the engine was detached: this loader and this optimizer are private no more. Use your own"
)
VOID = (
    "this loader iterator is void: a later one was started, or the engine was loaded. Iterate the "
    "loader anew"
)
NOT_STEPPED = (
    "the next batch was asked for, but optimizer.step() was not called for the one that is out. "
    "Call step() after every backward: it takes the update when the logical batch is complete. To "
    "accumulate gradients over smaller batches, set physical_batch_size= in make_private; "
    "accumulating by hand would double what one record can do"
)
NO_BATCH = (
    "step() without a private batch: every step takes a batch from the loader that make_private "
    "returned, then forward, backward, step"
)
NO_BACKWARD = (
    "step() without a backward: no gradient of a private layer came back for the batch that is "
    "out. Call loss.backward() between zero_grad() and step(), without inputs=: a backward that "
    "asks for some tensors only leaves nothing here"
)
SPOILED = (
    "step() after one that failed while it added the records of this batch: some of them may be in "
    "the sum already, and would count twice. Leave the loop over the loader and begin it again: "
    "the batch then starts afresh"
)
BATCH_OUT = "parameters can't be added while a private batch is out; finish it with step() first"
OWN_OPTIMIZER = (
    "step() of the optimizer that was given to make_private: it would move the weights by "
    "gradients without clipping or noise. Use the optimizer and the loader that make_private "
    "returned; engine.detach() ends private training"
)
