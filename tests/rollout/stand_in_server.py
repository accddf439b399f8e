"""An inference server's calls for weights, of vLLM and of SGLang, with workers that are threads of this process."""

import contextlib
import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.shared_memory import SharedMemory
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

PACKED = ("packed", "packed_buffer_size_bytes", "packed_num_buffers")


class StandInServer:
    """Listens at ``url`` in a context.

    Args:
        workers: Number of workers, each with a gloo group of its own.
        fails: Call that fails, to ``"refuse"``, ``"die"`` (the connection ends) or ``"late"``.
        old: Takes the settings of packing with each update, as before vLLM 0.28.
    """

    def __init__(self, workers=1, fails=None, old=False):
        self.workers, self.fails, self.old = workers, fails or {}, old
        self.calls = []  # paths with queries, in order
        self.received = []  # (name, dtype, shape, bytes) in order
        self.buffers = []  # bytes of each buffer
        self._packing, self._groups = {}, []
        self._released = threading.Event()

    def __enter__(self):
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self._answer(None)

            def do_POST(self):
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, body):
                outer.calls.append(self.path)
                path = urlsplit(self.path).path
                failure = outer.fails.get(path)
                if failure == "die":
                    return  # closes the connection
                if failure == "late":
                    outer._released.wait(60)
                    return
                status, answer = (503, "not now\nplease") if failure else outer.answer(path, body)
                with contextlib.suppress(OSError):  # the client may have left
                    self.send_response(status)
                    self.end_headers()
                    self.wfile.write((answer if isinstance(answer, str) else json.dumps(answer)).encode())

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._released.set()
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path, body):
        """Returns status and answer of a call."""
        if path == "/get_world_size":
            return 200, {"world_size": self.workers}
        if path in ("/init_weight_transfer_engine", "/init_weights_update_group"):
            info = body.get("init_info", body)
            if self.old and "packed" in info:
                return 500, "TypeError: __init__() got an unexpected keyword argument 'packed'"
            self._packing = {key: info[key] for key in PACKED if key in info}
            self._join(info)
        elif path == "/update_weights":
            info = body["update_info"]
            self._take_shared(info) if "shared_memory" in info else self._take_packed(info)
        elif path == "/update_weights_from_distributed":
            assert body["group_name"] == "weight_transfer"
            for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
                self._note([name], [dtype], [shape], self._receive(_nbytes(dtype, shape), dtype, shape))
        return 200, {"success": True}

    def _join(self, info):
        if not info:
            return

        def join(worker):
            store = dist.TCPStore(info["master_address"], info["master_port"], info["world_size"], is_master=False)
            rank = info["rank_offset"] + worker
            return dist.ProcessGroupGloo(dist.PrefixStore("weight_transfer", store), rank, info["world_size"])

        with ThreadPoolExecutor(self.workers) as threads:
            self._groups = list(threads.map(join, range(self.workers)))

    def _receive(self, nbytes, dtype="uint8", shape=None):
        """Returns the bytes of one broadcast, which all workers must have received."""

        def receive(group):
            values = torch.empty([nbytes] if shape is None else shape, dtype=getattr(torch, dtype))
            options = dist.BroadcastOptions()
            options.rootRank = 0
            group.broadcast([values], options).wait()
            return values.reshape(-1).view(torch.uint8).numpy().tobytes()

        with ThreadPoolExecutor(self.workers) as threads:
            received = set(threads.map(receive, self._groups))
        assert len(received) == 1
        return received.pop()

    def _take_packed(self, info):
        packing = {key: info[key] for key in PACKED if key in info} if self.old else self._packing
        assert packing["packed"] is True and packing["packed_num_buffers"] == 2
        rows = list(zip(info["names"], info["dtype_names"], info["shapes"], strict=True))
        while rows:
            taken, size = [], 0
            while rows and size <= packing["packed_buffer_size_bytes"]:
                taken.append(rows.pop(0))
                size += _nbytes(*taken[-1][1:])
            self.buffers.append(size)
            self._note(*zip(*taken, strict=True), self._receive(size))

    def _take_shared(self, info):
        block = SharedMemory(info["shared_memory"])
        sizes = [_nbytes(*row) for row in zip(info["dtype_names"], info["shapes"], strict=True)]
        assert info["tensor_sizes"] == sizes
        self.buffers.append(sum(sizes))
        self._note(info["names"], info["dtype_names"], info["shapes"], bytes(block.buf[: sum(sizes)]))
        block.close()

    def _note(self, names, dtypes, shapes, data):
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            size = _nbytes(dtype, shape)
            self.received.append((name, dtype, tuple(shape), data[:size]))
            data = data[size:]
        assert not data


def _nbytes(dtype, shape):
    return math.prod(shape) * getattr(torch, dtype).itemsize
