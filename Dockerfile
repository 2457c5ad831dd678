# The reference server on a CPU, with TGI's command line:
#   docker build -t tgi-bench .
#   docker container run --shm-size 1g -p 8080:80 -v $PWD/data:/data tgi-bench --model-id preset:tiny-llama
# torch's CPU build is a tenth of the size: pass its index, which pytorch.org's selector prints, as TORCH_INDEX_URL.
# By digest in production: docs/install.md, "Container images".
ARG BASE=python:3.12.8-slim-bookworm
FROM ${BASE} AS build
WORKDIR /source
COPY requirements.lock pyproject.toml README.md LICENSE ./
COPY reference_server reference_server
COPY loadgen loadgen
COPY reports reports
COPY tuner tuner
RUN awk '/^[a-z]/ { kept = /^setuptools==/ } kept' requirements.lock > build.lock \
    && pip install --no-cache-dir --no-deps --require-hashes -r build.lock \
    && pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM ${BASE}
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX_URL=
COPY requirements.lock /tmp/requirements.lock
COPY --from=build /wheels /wheels
# The lock has the hashes of PyPI's build of torch. A build from another index is not in it; its libraries of CUDA are not
# needed.
RUN cd /tmp \
    && if [ -n "$TORCH_INDEX_URL" ]; then \
        awk '/^[a-z]/ { kept = !/^(torch|triton|nvidia-.*|cuda-.*)==/ } kept' requirements.lock > others.lock \
        && mv others.lock requirements.lock \
        && pip install --no-cache-dir --no-deps --index-url "$TORCH_INDEX_URL" "$TORCH"; \
    fi \
    && pip install --no-cache-dir --no-deps --require-hashes -r requirements.lock \
    && pip install --no-cache-dir --no-deps --no-index /wheels/*.whl \
    && pip check \
    && rm -r /wheels requirements.lock \
    && useradd --uid 1000 --create-home tgi \
    && install -d -o tgi -g tgi /data
USER 1000:1000
ENV PORT=80 \
    HUGGINGFACE_HUB_CACHE=/data \
    PYTHONUNBUFFERED=1
VOLUME /data
# Merged adapters are written to this folder.
WORKDIR /data
EXPOSE 80
ENTRYPOINT ["text-generation-launcher"]
