"""The loss scalers of other libraries as rules: each one's transition, state dict and quirks, one
file a peer.

Each file has `rule(**the peer's own argument names)`,
`from_state_dict(d, **settings) -> (rule, state)` and `to_state_dict(rule, state) -> d`. The rules
go wherever `DynamicScale` goes; nothing here imports a peer. `torch_amp` also has `take_over` and
`give_back`, for a whole job of torch.amp in mid-run.
"""

from . import apex as apex
from . import deepspeed as deepspeed
from . import fairseq as fairseq
from . import flax as flax
from . import jmp as jmp
from . import keras as keras
from . import megatron as megatron
from . import mmengine as mmengine
from . import nnabla as nnabla
from . import torch_amp as torch_amp
