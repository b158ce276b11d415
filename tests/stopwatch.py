"""A machine without a GPU as the benchmarks' stopwatch, and the command line as a person at a shell meets it."""

import torch
from typer.testing import CliRunner

from dsa_compile.bench.timing import Ceilings, Recording, Times
from dsa_compile.cli import app


class Cpu:
    """Always shows 12.5 us. ``bend``: what becomes of the outputs of a launch."""

    device = torch.device("cpu")
    name = "a CPU"
    bend = staticmethod(lambda *outputs: outputs)

    def record(self, launch, sets):
        outputs = [tuple(x.clone() for x in self.bend(*launch(*inputs))) for inputs in sets]

        def replay():
            for inputs, places in zip(sets, outputs):
                for place, x in zip(places, self.bend(*launch(*inputs))):
                    place.copy_(x)

        return Recording(outputs, replay)

    def time(self, recording):
        return Times(12.5, 12.25, 13.75)

    def extra_bytes(self, launch, inputs):
        return 3 << 20

    def ceilings(self, fp8):
        return Ceilings(800.0, 4000.0, 1600.0 if fp8 else None)

    def host_seconds(self, work):
        work()
        return 25e-6

    def release(self):
        return None

    def peak_bytes(self):
        return 5 << 30


def bench(name, *arguments):
    """``dsa-compile bench NAME``."""
    return CliRunner().invoke(app, ["bench", name, *map(str, arguments)])
