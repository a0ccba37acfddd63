"""Tinker's messages in protocol buffers, as plain values: training data in, log-probabilities and samples out.

- The client sends `forward_backward` in this form only, and reads its reply and that of `asample` in no other.
- Messages are declared here with the fields that are read or written. Others are skipped, as protocol buffers allow;
  of those, images, audio and sparse tensors are declared, so that they can be refused by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from protocol.errors import FieldRefused, MalformedMessage

FLOAT32, INT64 = 1, 2
"""Types of a tensor's numbers."""

STOP, LENGTH = 0, 1
"""Reasons for the end of a sample."""

_PACKAGE = "echo_swarm.tinker"

_FIELD = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "double": _FIELD.TYPE_DOUBLE,
    "int64": _FIELD.TYPE_INT64,
    "int32": _FIELD.TYPE_INT32,
    "bool": _FIELD.TYPE_BOOL,
    "string": _FIELD.TYPE_STRING,
    "bytes": _FIELD.TYPE_BYTES,
}

_MESSAGES = {
    "Tensor": "1 dense bytes, 2 sparse_csr bytes, 3 dtype int32, 4 *shape int64",
    "EncodedText": "1 tokens bytes",
    "Chunk": "1 encoded_text EncodedText, 2 image bytes, 3 dmel bytes",
    "LossInput": "1 key string, 2 value Tensor",
    "Datum": "1 *model_input Chunk, 2 *loss_fn_inputs LossInput, 3 *model_input_spans bytes",
    "LossNumber": "1 key string, 2 value double",
    "LossValue": "1 number double, 2 text string",
    "LossSetting": "1 key string, 2 value LossValue",
    "ForwardBackwardRequest": (
        "1 model_id string, 2 seq_id int32, 3 *data Datum, 4 loss_fn string, 5 *loss_fn_config LossNumber, "
        "6 forward_only bool, 7 *loss_fn_config_v2 LossSetting"
    ),
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32, 4 *trailing_shape int64",
    "Field": "1 key string, 2 value BatchedTensor",
    "ArrayRecord": "1 type_tag string, 2 *fields Field, 3 num_datums int64",
    "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 *loss_fn_outputs ArrayRecord, 3 *metrics LossNumber",
    "SampledSequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes",
    "SampleResponse": "1 *sequences SampledSequence",
}
"""Messages with their fields: number, name (* = repeated), type. A map is a repeated message of key and value."""


def _declared() -> Mapping[str, type[Message]]:
    """Return the classes of the messages."""
    file = descriptor_pb2.FileDescriptorProto(name="echo_swarm_tinker.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields.split(", "):
            number, place, kind = field.split()
            added = message.field.add(name=place.lstrip("*"), number=int(number))
            added.label = added.LABEL_REPEATED if place.startswith("*") else added.LABEL_OPTIONAL
            added.type = _TYPES.get(kind, _FIELD.TYPE_MESSAGE)
            if kind in _MESSAGES:
                added.type_name = f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


_CLASSES = _declared()


def message(name: str, **fields: Any) -> Any:
    """Return a new message."""
    return _CLASSES[name](**fields)


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """A sequence of T tokens, and what the loss needs to know of each."""

    tokens: np.ndarray[Any, Any]  # [T] int64
    inputs: Mapping[str, np.ndarray[Any, Any]]  # each [T], int64 or float32


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """A request to compute a loss, and its gradient unless it is `forward_only`."""

    model_id: str
    seq_id: int
    loss: str
    settings: Mapping[str, float]
    forward_only: bool
    data: Sequence[Any]
    """The examples as messages: `read_examples` reads them."""


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Read a request; its examples are not checked yet."""
    request = message("ForwardBackwardRequest")
    try:
        request.ParseFromString(body)
    except DecodeError as error:
        raise MalformedMessage(f"The body is no request for forward_backward: {error}.") from None
    settings = {entry.key: entry.value for entry in request.loss_fn_config}
    settings |= {entry.key: _number(entry.key, entry.value) for entry in request.loss_fn_config_v2}
    return ForwardBackward(
        request.model_id, request.seq_id, request.loss_fn, settings, request.forward_only, request.data
    )


def _number(name: str, value: Any) -> float:
    # A text is refused where settings are checked, with the other values that are none of a number.
    return float("nan") if value.text else float(value.number)


def read_examples(data: Sequence[Any]) -> list[TrainingExample]:
    """Read the examples of a request."""
    if not data:
        raise FieldRefused("forward_backward has no data.")
    return [_read_example(f"data[{number}]", datum) for number, datum in enumerate(data)]


def _read_example(place: str, datum: Any) -> TrainingExample:
    for chunk in datum.model_input:
        if chunk.image or chunk.dmel:
            raise FieldRefused(f"{place}.model_input has an image or audio.", hint="Only tokens can be trained on.")
    parts = [_numbers(f"{place}.model_input", chunk.encoded_text.tokens, np.int32) for chunk in datum.model_input]
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
    inputs = {entry.key: _tensor(f"{place}.{entry.key}", entry.value) for entry in datum.loss_fn_inputs}
    if not len(tokens):
        raise FieldRefused(f"{place}.model_input is empty.")
    for name, values in inputs.items():
        if values.shape != tokens.shape:
            raise FieldRefused(
                f"{place}.{name} has the shape {list(values.shape)}, and model_input has {len(tokens)} tokens.",
                hint="Each input of a loss has one number for each token of model_input.",
            )
    return TrainingExample(tokens, inputs)


def _tensor(place: str, tensor: Any) -> np.ndarray[Any, Any]:
    if tensor.sparse_csr:
        raise FieldRefused(f"{place} is sparse, which is not offered.", hint="Send one number for each token.")
    if tensor.dtype not in (FLOAT32, INT64):
        raise FieldRefused(f"{place} has the type {tensor.dtype}.", hint="float32 and int64 can be read.")
    values = _numbers(place, tensor.dense, np.float32 if tensor.dtype == FLOAT32 else np.int64)
    if tensor.shape and list(tensor.shape) != [len(values)]:
        raise FieldRefused(
            f"{place} has the shape {list(tensor.shape)} and {len(values)} numbers.",
            hint="Only one number for each token is offered: no alternatives at a place.",
        )
    return values


def _numbers(place: str, data: bytes, dtype: Any) -> np.ndarray[Any, Any]:
    if len(data) % np.dtype(dtype).itemsize:
        raise MalformedMessage(f"{place} has {len(data)} bytes, which is no number of {np.dtype(dtype)}.")
    return np.frombuffer(data, dtype)


def write_output(logprobs: Sequence[np.ndarray[Any, Any]], loss: float) -> bytes:
    """Return the reply to `forward_backward`: log-probabilities of each example's targets, and the sum of the loss."""
    lengths = [4 * len(values) for values in logprobs]
    tensor = message(
        "BatchedTensor",
        data=np.concatenate(logprobs).astype(np.float32).tobytes(),
        offsets=np.cumsum([0, *lengths]).astype(np.int64).tobytes(),
        dtype=FLOAT32,
    )
    record = message("ArrayRecord", fields=[message("Field", key="logprobs", value=tensor)], num_datums=len(logprobs))
    output = message(
        "ForwardBackwardOutput",
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=[record],
        metrics=[message("LossNumber", key="loss:sum", value=loss)],
    )
    return bytes(output.SerializeToString())


def write_samples(samples: Sequence[tuple[Sequence[int], Sequence[float], bool]]) -> bytes:
    """Return the reply to `asample`, from tokens, log-probabilities, and whether a sample ended itself."""
    sequences = [
        message(
            "SampledSequence",
            stop_reason=STOP if ended else LENGTH,
            tokens=np.asarray(tokens, np.int32).tobytes(),
            logprobs=np.asarray(logprobs, np.float32).tobytes(),
        )
        for tokens, logprobs, ended in samples
    ]
    return bytes(message("SampleResponse", sequences=sequences).SerializeToString())
