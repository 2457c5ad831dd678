# The reference server on a CPU, with TGI's command line:
#   docker build -t tgi-bench .
#   docker container run --shm-size 1g -p 8080:80 -v $PWD/data:/data tgi-bench --model-id preset:tiny-llama
# torch's CPU build is a tenth of the size: pass its index, which pytorch.org's selector prints, as TORCH_INDEX_URL.
FROM python:3.12.8-slim-bookworm AS build
WORKDIR /source
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY reference_server reference_server
COPY loadgen loadgen
COPY reports reports
COPY tuner tuner
RUN pip install --no-cache-dir -c constraints.txt build setuptools \
    && python -m build --wheel --no-isolation --outdir /wheels .

FROM python:3.12.8-slim-bookworm
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX_URL=
COPY constraints.txt /tmp/constraints.txt
RUN pip install --no-cache-dir ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$TORCH"
COPY --from=build /wheels /wheels
RUN wheel="$(echo /wheels/*.whl)" \
    && pip install --no-cache-dir -c /tmp/constraints.txt "${wheel}[server,grammar]" \
    && rm -r /wheels /tmp/constraints.txt \
    && useradd --uid 1000 --create-home tgi \
    && install -d -o tgi -g tgi /data
USER 1000:1000
ENV PORT=80 \
    HUGGINGFACE_HUB_CACHE=/data \
    PYTHONUNBUFFERED=1
VOLUME /data
# Where a merged adapter goes.
WORKDIR /data
EXPOSE 80
ENTRYPOINT ["text-generation-launcher"]
