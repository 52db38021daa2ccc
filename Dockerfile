# Two images: cpu serves the demo of `make serve`, gpu holds a frontend and workers.
#
#   docker build --target cpu -t foveal:cpu .
#   docker run --rm --shm-size 2g -p 8000:8000 foveal:cpu
#
# Processed pictures live in /dev/shm, of which Docker gives a container 64 MB: --shm-size
# must exceed --mm-arena-gb. A frontend and workers in containers of their own hand tensors
# over in shared memory only if they share /dev/shm (--ipc) and process ids (--pid).

FROM python:3.11-slim-bookworm AS base
# What the Makefile needs, and the C and OpenMP runtimes and compiler that vLLM looks for.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libgomp1 libnuma1 make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /foveal
ENV UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1

FROM base AS cpu
# Dependencies first: they change less often than the sources.
COPY Makefile pyproject.toml README.md ./
COPY configs/requirements configs/requirements
RUN make install
COPY . .
# A second time, for the packages that were not there yet.
RUN touch pyproject.toml && make install \
    && .venv/bin/python -m configs.demo.checkpoint .demo/checkpoint
EXPOSE 8000
CMD ["make", "serve", "HOST=0.0.0.0"]

FROM base AS gpu
COPY . .
RUN python -m venv .venv \
    && .venv/bin/python -m pip install --editable '.[gpu]'
ENV PATH=/foveal/.venv/bin:$PATH
EXPOSE 8000
# One host with two GPUs: --gpus 2. On several, configs/multi-node-nixl.yaml, and behind it
# "--only frontend" or "--only workers".
CMD ["foveal", "up", "configs/single-node-shm.yaml", "--host", "0.0.0.0"]
