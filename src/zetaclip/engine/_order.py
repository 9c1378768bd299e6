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
REPLACED = (
    "the forward of {} was replaced after make_private, so its gradients would not be recorded. "
    "Replace it before make_private, or call engine.detach() first"
)
MOVED = (
    "{} was moved to {} on {} after make_private. Move the module before it, or call "
    "engine.detach() and make_private again"
)
REBUILT = (
    "a layer, parameter or buffer of {} was added, removed or replaced after make_private (by an "
    "assignment, by load_state_dict(assign=True), or by a forward that builds it on first use). "
    "Change the module before make_private (run such a forward once before it, on made-up "
    "records), or call engine.detach() and make_private again (the ledger of the first run still "
    "counts)"
)
FROZEN = (
    "{} was {} after make_private. Give new parameters to optimizer.add_param_group, or freeze and "
    "unfreeze before make_private (engine.detach() allows another one; the ledger of the first "
    "still counts)"
)
UNKNOWN = (
    "the optimizer holds a parameter that was not there at make_private and has a gradient that is "
    "neither clipped nor noised. Add parameters of the module with add_param_group of the private "
    "optimizer"
)
FOREIGN = (
    "{}.grad was written by autograd itself: the parameter is used outside its layer's forward (as "
    "in F.linear(x, layer.weight), or a penalty on weights in the loss), so that gradient is "
    "neither clipped nor noised. Call the layer instead; for a penalty use the optimizer's "
    "weight_decay"
)
BUFFERS_WRITTEN = (
    "the training forward changed {}: buffers and frozen parameters are neither clipped nor "
    "noised, so what they learn from records would leave without privacy. Use a layer without "
    "running state (GroupNorm for BatchNorm), or compute the value outside of forward"
)
WEIGHTS_WRITTEN = (
    "{} was written while a batch was out, by the training forward or the loop around it: only "
    "gradients are clipped and noised, so what a trained parameter gets in another way (a codebook "
    "that follows the records, an initial value taken from the first batch) would leave without "
    "privacy. Let the loss train it, or set it on made-up records before make_private; a "
    "constraint on weights, or other weights for an evaluation, belong between step() and the next "
    "batch"
)
