#include "onednn.h"

#include <dlfcn.h>

#include <cstring>

namespace gluon_amp::onednn {

namespace {

constexpr char kLibrary[] = "libdnnl.so.3";
constexpr int kCpu = 1, kDefaultFlags = 1, kUserScratchpad = 1, kSameType = 0;

Functions look_up() {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (!library) fail("oneDNN is not there: ", dlerror());
  Functions f;
#define LOOK_UP(result, name, parameters)                                     \
  f.name = reinterpret_cast<decltype(f.name)>(dlsym(library, "dnnl_" #name)); \
  if (!f.name) fail("expected oneDNN 3, received ", kLibrary, " without dnnl_", #name);
  FOR_FUNCTIONS(LOOK_UP)
#undef LOOK_UP
  const auto* version = f.version();
  if (version->major != 3) fail("expected oneDNN 3, received ", version->major, ".", version->minor);
  return f;
}

Dims row_major(const Dims& dims) {
  Dims strides(dims.size(), 1);
  for (size_t i = dims.size(); i-- > 1;) strides[i - 1] = strides[i] * dims[i];
  return strides;
}

using AttrPointer = std::unique_ptr<Attr, int (*)(Attr*)>;

AttrPointer make_attr(float scale, bool adds) {
  const Functions& f = functions();
  Attr* attr = nullptr;
  check(f.primitive_attr_create(&attr), "attributes");
  AttrPointer owned(attr, f.primitive_attr_destroy);
  // oneDNN's own scratchpad belongs to a thread, and MXNet runs an operator on any.
  check(f.primitive_attr_set_scratchpad_mode(attr, kUserScratchpad), "a scratchpad mode");
  if (scale != 1 || adds) {
    PostOps* ops = nullptr;
    check(f.post_ops_create(&ops), "operations after another");
    const std::unique_ptr<PostOps, int (*)(PostOps*)> owned_ops(ops, f.post_ops_destroy);
    if (scale != 1) check(f.post_ops_append_eltwise(ops, kLinear, scale, 0), "a scale");
    if (adds) check(f.post_ops_append_sum(ops, 1, 0, kSameType), "a sum");
    check(f.primitive_attr_set_post_ops(attr, ops), "operations after another");
  }
  return owned;
}

// Whether a description came to an implementation whose name begins so; it is at the last one otherwise.
bool advance(PrimitiveDesc* desc, const char* name) {
  const Functions& f = functions();
  do {
    const char* found = "";
    check(f.primitive_desc_query(desc, kImplementation, 0, &found), "an implementation's name");
    if (!std::strncmp(found, name, std::strlen(name))) return true;
  } while (!f.primitive_desc_next_impl(desc));
  return false;
}

}  // namespace

const Functions& functions() {
  static const Functions all = look_up();  // tried again after a failure
  return all;
}

Engine* engine() {
  static Engine* one = [] {
    Engine* made = nullptr;
    check(functions().engine_create(&made, kCpu, 0), "an engine");
    return made;
  }();
  return one;
}

void check(int status, const char* what) {
  if (status) fail("oneDNN could not make or run ", what, ": status ", status);
}

Desc::Desc(MemoryDesc* desc) : desc_(desc, functions().memory_desc_destroy) {}

Desc::Desc(const Dims& dims, DataType type, const Dims& strides) {
  MemoryDesc* desc = nullptr;
  check(functions().memory_desc_create_with_strides(&desc, static_cast<int>(dims.size()), dims.data(), type,
                                                    strides.data()),
        "a description of memory");
  desc_.reset(desc, functions().memory_desc_destroy);
}

Desc::Desc(const Dims& dims, DataType type) : Desc(dims, type, row_major(dims)) {}

Desc Desc::any(const Dims& dims, DataType type) {
  MemoryDesc* desc = nullptr;
  check(functions().memory_desc_create_with_tag(&desc, static_cast<int>(dims.size()), dims.data(), type, kAny),
        "a description of memory");
  return Desc(desc);
}

size_t bytes(Md desc) { return functions().memory_desc_get_size(desc); }

bool are_equal(Md one, Md other) { return functions().memory_desc_equal(one, other) != 0; }

Primitive::Primitive(const char* what, const std::function<int(PrimitiveDesc**, const Attr*)>& make, float scale,
                     bool adds, const char* preferred) {
  const Functions& f = functions();
  const AttrPointer attr = make_attr(scale, adds);
  PrimitiveDesc* desc = nullptr;
  const auto describe = [&] {
    check(make(&desc, attr.get()), what);
    desc_.reset(desc, f.primitive_desc_destroy);
  };
  describe();
  if (!advance(desc, preferred)) describe();
  PrimitiveHandle* handle = nullptr;
  check(f.primitive_create(&handle, desc), what);
  handle_.reset(handle, f.primitive_destroy);
}

Md Primitive::query(Query what, int index) const {
  return functions().primitive_desc_query_md(desc_.get(), what, index);
}

void Primitive::run(std::initializer_list<Array> arrays) const {
  const Functions& f = functions();
  std::vector<std::unique_ptr<Memory, int (*)(Memory*)>> owned;
  std::vector<Argument> arguments;
  const auto add = [&](int kind, Md desc, const void* data) {
    Memory* memory = nullptr;
    check(f.memory_create(&memory, desc, engine(), const_cast<void*>(data)), "a memory object");
    owned.emplace_back(memory, f.memory_destroy);
    arguments.push_back({kind, memory});
  };
  for (const Array& array : arrays)
    if (array.data) add(array.kind, array.desc, array.data);
  const Md scratchpad = query(kScratchpad);
  if (bytes(scratchpad)) add(kScratchpadData, scratchpad, scratch<Primitive>(bytes(scratchpad)));
  Stream* stream = nullptr;
  check(f.stream_create(&stream, engine(), kDefaultFlags), "a stream");
  const std::unique_ptr<Stream, int (*)(Stream*)> owned_stream(stream, f.stream_destroy);
  check(f.primitive_execute(handle_.get(), stream, static_cast<int>(arguments.size()), arguments.data()),
        "a primitive");
  check(f.stream_wait(stream), "a primitive");
}

const void* reordered(const Dims& key, Md from, const void* values, Md to, void* target) {
  const auto primitive = cached<Primitive>(key, [&] {
    return Primitive("an array in another order", [&](PrimitiveDesc** desc, const Attr* attr) {
      return functions().reorder_primitive_desc_create(desc, from, engine(), to, engine(), attr);
    });
  });
  struct Reordered {};
  if (!target) target = scratch<Reordered>(bytes(to));
  primitive->run({{kSrc, from, values}, {kDst, to, target}});
  return target;
}

}  // namespace gluon_amp::onednn
