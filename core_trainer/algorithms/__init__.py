"""Pure functions over tensors, one file a family. They see log-probs, masks and advantages, never text or token ids.

Importing the package registers every built-in algorithm.
"""

from core_trainer.algorithms import advantages as advantages
from core_trainer.algorithms import aggregation as aggregation
from core_trainer.algorithms import correction as correction
from core_trainer.algorithms import kl as kl
from core_trainer.algorithms import policy_losses as policy_losses
from core_trainer.algorithms import shaping as shaping
