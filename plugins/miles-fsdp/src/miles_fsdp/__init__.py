"""A trainer of Hugging Face modules under PyTorch's FSDP2.

    trainer.py       FsdpTrainer: what a rollout goes through, in the order of its calls
    models.py        the actor, and models beside it that train or only score
    trained.py       a model that trains: its optimizer and its steps
    value.py         the head of a critic
    module.py        one sharded module: its body, its head, and whether it takes samples packed
    lean.py          norms and gated layers that keep less for the backward pass
    attention.py     of packed samples, without a mask: torch's flash attention on a GPU
    context.py       ranks that share the rows of a sample; tensor_parallel.py, the projections of a layer
    microbatch.py    packed samples and the rows that are trained on
    scored.py        log-probs and entropy of these rows, in chunks
    optimizer.py     AdamW, its schedule and clipping
    checkpoint.py    checkpoints, Hugging Face directories, hashes
    stored.py        names of tensors in a directory's files, and what these hold beside the model
    async_save.py    copies for a checkpoint that is written beside training
    ranks.py         processes that know one another, and sums over them
    refusals.py      what has no effect here and is refused; memory.py: what a plan says of memory
"""

import getpass
import os
import tempfile

try:
    _user = getpass.getuser()
except (KeyError, OSError):  # a container's, without a name
    _user = f"uid_{os.getuid()}"
# FSDP2 imports dynamo, which sets this, to the same, where nobody has: in a rank that is a thread, while others read
# the environment or start processes with it.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"torchinductor_{_user}"))
