"""Single: one process, without communication. The baseline."""

from outpace.parallel.cuda_graphs import CudaRecorder, GraphedLayout
from outpace.parallel.layout import Layout, LayoutRequest


def apply(request: LayoutRequest) -> Layout:
    """Use the objective unchanged, with CUDA graphs if the request asks for them."""
    if request.cuda_graphs:
        recorder = CudaRecorder(request.device)
        return GraphedLayout(request.objective, recorder, request.on_failure)
    return Layout(request.objective)
