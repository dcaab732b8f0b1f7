"""The local engine: decodes in the driver's process, on the CPU or a GPU, with its own copy of the weights.

    engine.py         LocalEngine: the asynchronous contract and the one thread that decodes
    placing.py        the device, what decodes a checkpoint there, and how much of its memory
    batch.py          the rows that decode together: their requests, their results, when each ends
    cache.py          the keys and values of these rows
    decode.py         the forward pass of Llama and its kin, on a CPU bit-identical in any batch
    device.py         the same on a GPU: packed prefills, and steps as CUDA graphs
    modules.py        the forward pass of any architecture, through its transformers module
    recurrent.py      layers whose past is a state; recomputed.py, architectures that no cache here fits
    routing.py        the experts that tokens pass in such a module
    architectures.py  which ones those are
    operands.py       products that round their inputs, where a weight says so
    weights.py        the engine's copy of a checkpoint, filled from Hugging Face names
    sampling.py       keyed draws and stop strings
    heap.py           what glibc keeps of freed memory

and what trainers share:

    objective.py      the loss of a micro-batch from the run's hooks
    on_policy.py      the checks of --true-on-policy-mode
    logits.py         log-probs and their gradients by kernels of a GPU
    muon.py           Muon's arithmetic
    rendezvous.py     ranks meet; transfer.py, arrays reach the device
    saving.py         the thread that writes a checkpoint beside training; stored.py, whether it still is what was

and what weight syncs share:

    buckets.py        the stream of weights in flat buffers of limited size
"""

import os

# decode.py needs that a row of a product does not depend on how many there are. MKL promises that in this mode alone;
# its kernels for Intel's processors without AVX-512 do not keep it otherwise. It is read at MKL's first call.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
