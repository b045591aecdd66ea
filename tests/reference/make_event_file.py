"""One record of an event file as TensorBoard's own writer makes it: common/src/testdata/tensorboard.hex."""

import io
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

# `SummaryWriter.add_scalar("loss", 0.5, 3)` of torch.utils.tensorboard, at a fixed time.
event = Event(
    wall_time=1_700_000_000.5,
    step=3,
    summary=Summary(value=[Summary.Value(tag="loss", simple_value=0.5)]),
)
out = io.BytesIO()
RecordWriter(out).write(event.SerializeToString())
path = Path(__file__).parents[2] / "common/src/testdata/tensorboard.hex"
path.write_text(out.getvalue().hex() + "\n")
