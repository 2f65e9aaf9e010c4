"""Functions of multi-token prediction, which the headers of llama.cpp do not declare."""

from __future__ import annotations

# The MTP functions are exported under their C++ names only. A build without them lacks MTP; the rest works.
MTP_NAMES = {
    "llama_set_embeddings_nextn": "_Z26llama_set_embeddings_nextnP13llama_contextbb",
    "llama_get_embeddings_nextn": "_Z26llama_get_embeddings_nextnP13llama_context",
    "llama_get_embeddings_nextn_ith": "_Z30llama_get_embeddings_nextn_ithP13llama_contexti",
    "llama_set_nextn_layer_offset": "_Z28llama_set_nextn_layer_offsetP13llama_contexti",
    "llama_get_ctx_other": "_Z19llama_get_ctx_otherP13llama_context",
}
MTP_DECLARATIONS = """
void _Z26llama_set_embeddings_nextnP13llama_contextbb(struct llama_context *, bool, bool);
float * _Z26llama_get_embeddings_nextnP13llama_context(struct llama_context *);
float * _Z30llama_get_embeddings_nextn_ithP13llama_contexti(struct llama_context *, int32_t);
void _Z28llama_set_nextn_layer_offsetP13llama_contexti(struct llama_context *, int32_t);
struct llama_context * _Z19llama_get_ctx_otherP13llama_context(struct llama_context *);
size_t strlen(const char *);
"""
