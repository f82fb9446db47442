"""What kernels take of a processor's registers, which says how many programs run at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from no_device import run_scenes


@pytest.mark.skipif(torch.cuda.is_available(), reason="its driver is not replaced")
def test_kernels_leave_room_for_others():
    run_scenes(Path(__file__).with_name("register_scenes.py"), at_least=1)
