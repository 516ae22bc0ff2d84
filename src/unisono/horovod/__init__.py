"""Adapter with the interface of `horovod.torch`, for programs that move from Horovod.

    - import horovod.torch as hvd              horovodrun -np 4 python train.py
    + import unisono.horovod as hvd            unisono run --ranks 4 train.py

The rest of the program stays. Different (`docs/how_to/from_horovod.md`): no elastic training, process sets or Adasum;
ranks make their calls in one order.
"""

from unisono.errors import UnisonoError
from unisono.horovod.collectives import Average as Average
from unisono.horovod.collectives import Compression as Compression
from unisono.horovod.collectives import Max as Max
from unisono.horovod.collectives import Min as Min
from unisono.horovod.collectives import Product as Product
from unisono.horovod.collectives import ReduceOp as ReduceOp
from unisono.horovod.collectives import Sum as Sum
from unisono.horovod.collectives import allgather as allgather
from unisono.horovod.collectives import allgather_async as allgather_async
from unisono.horovod.collectives import allgather_object as allgather_object
from unisono.horovod.collectives import allreduce as allreduce
from unisono.horovod.collectives import allreduce_ as allreduce_
from unisono.horovod.collectives import allreduce_async as allreduce_async
from unisono.horovod.collectives import allreduce_async_ as allreduce_async_
from unisono.horovod.collectives import alltoall as alltoall
from unisono.horovod.collectives import alltoall_async as alltoall_async
from unisono.horovod.collectives import barrier as barrier
from unisono.horovod.collectives import broadcast as broadcast
from unisono.horovod.collectives import broadcast_ as broadcast_
from unisono.horovod.collectives import broadcast_async as broadcast_async
from unisono.horovod.collectives import broadcast_async_ as broadcast_async_
from unisono.horovod.collectives import broadcast_object as broadcast_object
from unisono.horovod.collectives import broadcast_optimizer_state as broadcast_optimizer_state
from unisono.horovod.collectives import broadcast_parameters as broadcast_parameters
from unisono.horovod.collectives import grouped_allreduce as grouped_allreduce
from unisono.horovod.collectives import grouped_allreduce_ as grouped_allreduce_
from unisono.horovod.collectives import grouped_allreduce_async as grouped_allreduce_async
from unisono.horovod.collectives import grouped_allreduce_async_ as grouped_allreduce_async_
from unisono.horovod.collectives import poll as poll
from unisono.horovod.collectives import reducescatter as reducescatter
from unisono.horovod.collectives import reducescatter_async as reducescatter_async
from unisono.horovod.collectives import synchronize as synchronize
from unisono.horovod.optimizer import DistributedOptimizer as DistributedOptimizer
from unisono.horovod.optimizer import join as join
from unisono.horovod.session import ccl_built as ccl_built
from unisono.horovod.session import cross_rank as cross_rank
from unisono.horovod.session import cross_size as cross_size
from unisono.horovod.session import cuda_built as cuda_built
from unisono.horovod.session import ddl_built as ddl_built
from unisono.horovod.session import gloo_built as gloo_built
from unisono.horovod.session import gloo_enabled as gloo_enabled
from unisono.horovod.session import init as init
from unisono.horovod.session import is_homogeneous as is_homogeneous
from unisono.horovod.session import is_initialized as is_initialized
from unisono.horovod.session import local_rank as local_rank
from unisono.horovod.session import local_size as local_size
from unisono.horovod.session import mpi_built as mpi_built
from unisono.horovod.session import mpi_enabled as mpi_enabled
from unisono.horovod.session import mpi_threads_supported as mpi_threads_supported
from unisono.horovod.session import nccl_built as nccl_built
from unisono.horovod.session import rank as rank
from unisono.horovod.session import rocm_built as rocm_built
from unisono.horovod.session import shutdown as shutdown
from unisono.horovod.session import size as size

HorovodInternalError = UnisonoError
