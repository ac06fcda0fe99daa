"""The loss scalers of other libraries as rules, with their transitions, state dicts and quirks; one
file for each library.

Each file has `rule(**the library's own argument names)`,
`from_state_dict(d, **settings) -> (rule, state)` and `to_state_dict(rule, state) -> d`. The rules
work in place of `DynamicScale`, and these files do not import the other libraries. `torch_amp` also
has `take_over` and `give_back`, for a running job of torch.amp.
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
