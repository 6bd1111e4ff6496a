"""A server that speaks as much of Modal's protocol as `gdn modal` needs, on this machine.

Modal's own client talks to it, so the errors, the uploads, the waiting and the
interrupts that tests see are its own. What was declared (functions, images, volumes)
and uploaded is kept for the tests to look at. A call is carried out as Modal does it:
the function is imported by name, in a fresh process in an empty folder, where only the
uploaded files are. What it does otherwise, a test says beforehand (`Server.failing`,
`Server.answer`), and of the network (`Server.outage`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import grpclib
from google.protobuf import empty_pb2
from grpclib.server import Server as Listener
from modal_proto import api_pb2 as pb
from modal_proto.api_grpc import ModalClientBase

TOKEN = ("ak-TESTTOKEN", "as-TESTSECRET")

# As a container does: import the function by name, from the uploaded files only, and call it.
_CALL = """
import importlib, sys
module = importlib.import_module(sys.argv[1])
assert module.__file__.startswith(sys.argv[3]), module.__file__
if len(sys.argv) > 4:
    import modal
    modal.current_function_call_id = lambda: sys.argv[4]
data = sys.stdin.buffer.read()
sys.stdout.buffer.write(getattr(module, sys.argv[2])(data))
"""


class Server:
    """`with Server() as s`: its address is `s.url`."""

    def __init__(self, **behaviour: Any):
        # RPC -> the error that it answers with
        self.failing = {}
        # RPC -> what its next requests get: see _fault; then it works again
        self.faults = {}
        self.image_result = None  # a GenericResult in the place of success
        self.image_logs = []
        # called with (number of the call, parcel): bytes, a GenericResult, None for
        # "not yet"
        self.answer = None
        # records on a call's queue, at which its first container is ended
        self.preempt_after = None
        self.preempted = []
        self.create_delay = 0.0  # seconds that the creation of a function takes
        for name, value in behaviour.items():
            setattr(self, name, value)
        self.rpcs = []
        self.metadata = {}
        self.functions = []
        self.deployed = {}  # name of an app -> its function's number
        self.bound = []  # the options of each run
        self.images = []
        self.mounts = {}  # mount id -> path there -> sha256
        self.contents = {}  # sha256 -> content
        self.volumes = {}  # name -> path -> content
        # (name, partition) -> items, pickled
        self.queues = {}
        self.dicts = {}  # (name, key) -> value, both pickled
        self.calls = {}  # id -> parcel
        self.results = {}
        self.cancelled = []
        self._ready = threading.Event()

    # --- life

    def __enter__(self):
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), daemon=True
        )
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: Any):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    async def _serve(self):
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._network, self._cables = "up", set()
        listener = Listener([_service(self)])
        await listener.start("127.0.0.1", 0)
        self._behind = listener._server.sockets[0].getsockname()
        door = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{door.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        door.close()
        listener.close()

    # --- the network in front of it

    def outage(self, kind: str, seconds: float | None = None):
        """`"reset"`: connections are cut, and new ones accepted and reset. `"silence"`:
        nothing passes. After `seconds` it is over.
        """

        def begin():
            self._network = kind
            if kind == "reset":
                for cable in self._cables:
                    cable.transport.abort()
            if seconds is not None:
                self._loop.call_later(seconds, setattr, self, "_network", "up")

        self._loop.call_soon_threadsafe(begin)

    async def _connected(self, reader: Any, writer: Any):
        if self._network == "reset":
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection(*self._behind)
        self._cables |= {writer, back}
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(self._pass(reader, back), self._pass(there, writer))

    async def _pass(self, reader: Any, writer: Any):
        try:
            while data := await reader.read(1 << 16):
                while self._network == "silence":
                    await asyncio.sleep(0.02)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        self._cables.discard(writer)
        writer.close()

    @property
    def env(self):
        """The environment that a client needs to connect here."""
        return {
            "MODAL_SERVER_URL": self.url, "MODAL_TOKEN_ID": TOKEN[0], "MODAL_TOKEN_SECRET": TOKEN[1],
            "MODAL_CONFIG_PATH": "/nonexistent/modal.toml", "MODAL_ENVIRONMENT": "main", "MODAL_LOGS_TIMEOUT": "1",
        }  # fmt: skip

    # --- its arguments

    def lay_out(self, root: Path):
        """Write the files that the last function mounted under `root`; returns the
        stand-in for /root.
        """
        for mount in self.functions[-1].mount_ids:
            for name, sha in self.mounts.get(mount, {}).items():
                path = root / name.lstrip("/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.contents[sha])
        return root / "root"

    def carry_out(self, id: str):
        """A call's result, made as a container makes it."""
        if self.answer is not None:
            number = list(self.calls).index(id)
            return self.answer(number, self.calls[id])
        function = self.functions[-1]
        with tempfile.TemporaryDirectory(prefix="modal-") as folder:
            root = self.lay_out(Path(folder) / "files")
            empty = Path(folder) / "empty"
            empty.mkdir()
            env = {
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "HOME": str(empty),
                "PYTHONPATH": str(root),
            }
            names = [function.module_name, function.implementation_name, str(root)]
            # then it can talk to this server, as a container can
            if self.preempt_after is not None:
                env, names = env | self.env, [*names, id]
            command = [sys.executable, "-c", _CALL, *names]
            with subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=empty,
                env=env,
            ) as process:
                if self.preempt_after is not None and id not in self.preempted:
                    threading.Thread(
                        target=self._preempt, args=(id, process), daemon=True
                    ).start()
                out, err = process.communicate(self.calls[id])
            # the same input is started again, as Modal does it
            if process.returncode == -signal.SIGKILL:
                return self.carry_out(id)
        if process.returncode:
            status = pb.GenericResult.GENERIC_STATUS_FAILURE
            return pb.GenericResult(
                status=status, exception=err.decode().strip().splitlines()[-1]
            )
        return out

    def _preempt(self, id: str, process: subprocess.Popen):
        while process.poll() is None:
            if (
                sum(
                    len(items) for (_, call), items in self.queues.items() if call == id
                )
                >= self.preempt_after
            ):
                self.preempted.append(id)
                process.kill()
                return
            time.sleep(0.005)


def failure(status: str, text: str, data: bytes = b"", trace: str = ""):
    """A result that is none: status is FAILURE, TIMEOUT, INTERNAL_FAILURE, ..."""
    number = getattr(pb.GenericResult, f"GENERIC_STATUS_{status}")
    return pb.GenericResult(status=number, exception=text, data=data, traceback=trace)


# --- the protocol


def _service(s: Server):
    """The servicer: what `_Answers` has a method for, and UNIMPLEMENTED for everything else."""
    streams = ("ImageJoinStreaming", "AppGetLogs", "VolumeListFiles")

    def unary(name: str):
        async def handle(self: Any, stream: Any):
            request = await stream.recv_message()
            s.rpcs.append(name)
            s.metadata |= dict(stream.metadata)
            if name in s.failing:
                status, text = s.failing[name]
                raise grpclib.GRPCError(status, text)
            fault = s.faults[name].pop(0) if s.faults.get(name) else None
            if fault not in (None, "lost"):
                await _fault(fault, stream)
            answer = getattr(_Answers, name, None)
            if answer is None:
                raise grpclib.GRPCError(grpclib.Status.UNIMPLEMENTED, name)
            if fault == "lost":
                answer(s, request)
                await _fault(fault, stream)
            replied = answer(s, request)
            if asyncio.iscoroutine(replied):
                replied = await replied
            for message in replied if name in streams else [replied]:
                await stream.send_message(message)

        return handle

    names = ModalClientBase.__abstractmethods__
    return type("Service", (ModalClientBase,), {name: unary(name) for name in names})()


async def _fault(kind: Any, stream: Any):
    """`"reset"`: the connection is cut; `"lost"`: once the request is carried out.
    `"silence"`: there is never an answer. (status, text): an error.
    """
    if kind in ("reset", "lost"):
        stream._stream._transport.abort()
    if kind in ("reset", "lost", "silence"):
        await asyncio.Event().wait()
    raise grpclib.GRPCError(*kind)


class _Answers:
    """Each is called with the server and the request."""

    def ClientHello(s, r):
        return pb.ClientHelloResponse()

    def AuthTokenGet(s, r):
        return pb.AuthTokenGetResponse(token="e30.eyJleHAiOiA5OTk5OTk5OTk5fQ.e30")

    def EnvironmentGetOrCreate(s, r):
        settings = pb.EnvironmentSettings(image_builder_version="2025.06")
        metadata = pb.EnvironmentMetadata(name="main", settings=settings)
        return pb.EnvironmentGetOrCreateResponse(
            environment_id="en-1", metadata=metadata
        )

    def AppCreate(s, r):
        return pb.AppCreateResponse(
            app_id="ap-" + "1" * 22, app_page_url="https://example.invalid/app"
        )

    def AppHeartbeat(s, r):
        return empty_pb2.Empty()

    def AppPublish(s, r):
        s.deployed[r.name] = len(s.functions)
        return pb.AppPublishResponse(
            url="https://example.invalid/app", deployed_at=time.time()
        )

    def AppGetByDeploymentName(s, r):
        return pb.AppGetByDeploymentNameResponse()

    def FunctionGet(s, r):
        if r.app_name not in s.deployed:
            raise grpclib.GRPCError(grpclib.Status.NOT_FOUND, "no such app")
        assert r.object_tag == "serve"
        number = s.deployed[r.app_name]
        return pb.FunctionGetResponse(
            function_id=f"fu-{number}", handle_metadata=_handle("serve"),
            function=_data(s.functions[number - 1]),
        )  # fmt: skip

    def FunctionBindParams(s, r):
        s.bound.append(r.function_options)
        return pb.FunctionBindParamsResponse(
            bound_function_id=r.function_id, handle_metadata=_handle("serve")
        )

    def AppClientDisconnect(s, r):
        return empty_pb2.Empty()

    def AppGetLogs(s, r):
        return [pb.TaskLogsBatch(app_done=True)]

    def MountGetOrCreate(s, r):
        id = f"mo-{len(s.mounts)}"
        s.mounts[id] = {f.filename: f.sha256_hex for f in r.files}
        return pb.MountGetOrCreateResponse(
            mount_id=id, handle_metadata=pb.MountHandleMetadata()
        )

    def MountBatchedCheckExistence(s, r):
        missing = [sha for sha in r.sha256_hex_hashes if sha not in s.contents]
        return pb.MountBatchedCheckExistenceResponse(missing_sha256_hex_hashes=missing)

    def MountPutFile(s, r):
        if r.WhichOneof("data_oneof") == "data":
            assert hashlib.sha256(r.data).hexdigest() == r.sha256_hex
            s.contents[r.sha256_hex] = r.data
        return pb.MountPutFileResponse(exists=r.sha256_hex in s.contents)

    def ImageGetOrCreate(s, r):
        s.images.append(r.image)
        ok = pb.GenericResult(status=pb.GenericResult.GENERIC_STATUS_SUCCESS)
        if s.image_result is not None:
            return pb.ImageGetOrCreateResponse(image_id=f"im-{len(s.images)}")
        return pb.ImageGetOrCreateResponse(
            image_id=f"im-{len(s.images)}", result=ok, metadata=pb.ImageMetadata()
        )

    def ImageJoinStreaming(s, r):
        logs = [pb.TaskLogs(data=line + "\n") for line in s.image_logs]
        return [
            pb.ImageJoinStreamingResponse(task_logs=logs, entry_id="1-0"),
            pb.ImageJoinStreamingResponse(
                result=s.image_result, entry_id="2-0", eof=True
            ),
        ]

    def VolumeGetOrCreate(s, r):
        s.volumes.setdefault(r.deployment_name, {})
        metadata = pb.VolumeMetadata(
            version=pb.VOLUME_FS_VERSION_V1, name=r.deployment_name
        )
        return pb.VolumeGetOrCreateResponse(
            volume_id=f"vo-{r.deployment_name}", metadata=metadata
        )

    def VolumeListFiles(s, r):
        files = s.volumes[r.volume_id.removeprefix("vo-")]
        found = [
            pb.FileEntry(path=name, type=pb.FileEntry.FILE, size=len(data))
            for name, data in files.items()
        ]
        return [pb.VolumeListFilesResponse(entries=found)]

    def QueueGetOrCreate(s, r):
        return pb.QueueGetOrCreateResponse(queue_id=f"qu-{r.deployment_name}")

    def QueuePut(s, r):
        s.queues.setdefault(
            (r.queue_id.removeprefix("qu-"), r.partition_key.decode()), []
        ).extend(r.values)
        return empty_pb2.Empty()

    async def QueueNextItems(s, r):
        end, first = time.monotonic() + r.item_poll_timeout, int(r.last_entry_id or 0)
        while True:
            items = s.queues.get(
                (r.queue_id.removeprefix("qu-"), r.partition_key.decode()), []
            )
            if len(items) > first or time.monotonic() >= end:
                break
            await asyncio.sleep(0.02)
        found = [
            pb.QueueItem(value=v, entry_id=str(i + 1))
            for i, v in enumerate(items)
            if i >= first
        ]
        return pb.QueueNextItemsResponse(items=found)

    def DictGetOrCreate(s, r):
        return pb.DictGetOrCreateResponse(dict_id=f"di-{r.deployment_name}")

    def DictUpdate(s, r):
        (entry,) = r.updates
        there = (r.dict_id, entry.key) in s.dicts
        s.dicts.setdefault((r.dict_id, entry.key), entry.value)
        return pb.DictUpdateResponse(created=not there)

    def DictGet(s, r):
        return pb.DictGetResponse(found=True, value=s.dicts[r.dict_id, r.key])

    def FunctionPrecreate(s, r):
        return pb.FunctionPrecreateResponse(
            function_id=f"fu-{len(s.functions) + 1}",
            handle_metadata=_handle(r.function_name),
        )

    async def FunctionCreate(s, r):
        await asyncio.sleep(s.create_delay)
        s.functions.append(r.function)
        return pb.FunctionCreateResponse(
            function_id=f"fu-{len(s.functions)}", handle_metadata=_handle(r.function.function_name),
            function_data=_data(r.function),
        )  # fmt: skip

    def FunctionMap(s, r):
        id = f"fc-{len(s.calls)}"
        s.calls[id] = b""
        put = [_put(s, id, item) for item in r.pipelined_inputs]
        return pb.FunctionMapResponse(
            function_call_id=id, function_call_jwt=id, pipelined_inputs=put
        )

    def FunctionPutInputs(s, r):
        return pb.FunctionPutInputsResponse(
            inputs=[_put(s, r.function_call_id, item) for item in r.inputs]
        )

    async def FunctionGetOutputs(s, r):
        id = r.function_call_id
        if id not in s.results:
            s.results[id] = asyncio.create_task(asyncio.to_thread(s.carry_out, id))
        done, _ = await asyncio.wait([s.results[id]], timeout=max(r.timeout, 0.3))
        # a test's own answer: the client would ask until its limit
        if done and (e := s.results[id].exception()):
            result = failure("FAILURE", f"the test's answer failed: {e!r}")
        else:
            result = s.results[id].result() if done else None
        if done and result is None:  # to be asked again
            del s.results[id]
        if result is None:
            return pb.FunctionGetOutputsResponse(num_unfinished_inputs=1)
        if isinstance(result, bytes):
            ok = pb.GenericResult.GENERIC_STATUS_SUCCESS
            result = pb.GenericResult(status=ok, data=pickle.dumps(result, protocol=4))
        item = pb.FunctionGetOutputsItem(
            result=result, data_format=pb.DATA_FORMAT_PICKLE
        )
        return pb.FunctionGetOutputsResponse(outputs=[item])

    def FunctionCallCancel(s, r):
        s.cancelled.append(r.function_call_id)
        return empty_pb2.Empty()

    def FunctionCallFromId(s, r):
        if r.function_call_id not in s.calls:
            raise grpclib.GRPCError(grpclib.Status.NOT_FOUND, "no such call")
        return pb.FunctionCallFromIdResponse(
            function_call_id=r.function_call_id, num_inputs=1
        )


def _put(s: Server, id: str, item: Any):
    (parcel,), _ = pickle.loads(item.input.args)
    s.calls[id] = parcel
    return pb.FunctionPutInputsResponseItem(
        idx=item.idx, input_id=f"in-{id}", input_jwt=id
    )


def _data(function: pb.Function):
    ranked = [pb.FunctionData.RankedFunction(rank=0, function=function)]
    return pb.FunctionData(ranked_functions=ranked)


def _handle(name: str):
    kind = pb.Function.FUNCTION_TYPE_FUNCTION
    return pb.FunctionHandleMetadata(
        function_name=name,
        function_type=kind,
        max_object_size_bytes=1 << 24,
        max_async_object_size_bytes=1 << 24,
    )
