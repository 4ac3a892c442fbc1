// The module of kernels, and what the plug-in registers with TVM.
//
// A module is saved as TVM's code generator saves it (little-endian; a text is u64 bytes, bytes):
//
//   text format | u64 functions | functions | text source
//   function = text key | text name | u64 n, n x DLDataType | u64 n, n x text tag
//            | u64 n, n x i32 extra tag
#include <tvm/ffi/cast.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device_api.h"
#include "program.h"

// What TVM's code generator hands over; its header is not among the public ones, so the layout is
// repeated here. It is that of the TVM version that the plug-in is built for.
namespace tvm::runtime {

class FunctionInfoObj : public ffi::Object {
 public:
  ffi::String name;
  ffi::Array<DLDataType> arg_types;
  ffi::Array<ffi::String> launch_param_tags;
  ffi::Array<ffi::Any> arg_extra_tags;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("runtime.FunctionInfo", FunctionInfoObj, ffi::Object);
};

class FunctionInfo : public ffi::ObjectRef {
 public:
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NULLABLE(FunctionInfo, ffi::ObjectRef, FunctionInfoObj);
};

}  // namespace tvm::runtime

namespace hybridc::opencl {

namespace ffi = tvm::ffi;

namespace {

// A kernel's arguments and which sizes of the launch follow them.
struct Signature {
  std::string name;
  std::vector<DLDataType> types;
  std::vector<std::string> tags;
  std::vector<int32_t> extra;
};

// By key, in the order in which TVM gives them, so that a module is saved as TVM would save it.
using Signatures = std::vector<std::pair<std::string, Signature>>;

// Reads what a module was saved as.
class Reader {
 public:
  explicit Reader(const ffi::Bytes& bytes) : data_(bytes.data()), left_(bytes.size()) {}

  template <typename T>
  T value() {
    T result;
    std::memcpy(&result, take(sizeof(T)), sizeof(T));
    return result;
  }
  std::string text() {
    const auto size = value<uint64_t>();
    return std::string(take(size), size);
  }
  template <typename T>
  std::vector<T> values() {
    const auto count = value<uint64_t>();
    if (count > left_) refuse();
    std::vector<T> result;
    for (uint64_t index = 0; index < count; ++index) {
      if constexpr (std::is_same_v<T, std::string>) {
        result.push_back(text());
      } else {
        result.push_back(value<T>());
      }
    }
    return result;
  }

 private:
  const char* take(uint64_t size) {
    if (size > left_) refuse();
    const char* start = data_;
    data_ += size;
    left_ -= size;
    return start;
  }
  [[noreturn]] static void refuse() {
    TVM_FFI_THROW(RuntimeError) << "the OpenCL kernels are stored in a form that is not known";
  }

  const char* data_;
  uint64_t left_;
};

class Writer {
 public:
  template <typename T>
  void value(T item) {
    result_.append(reinterpret_cast<const char*>(&item), sizeof(T));
  }
  void text(const std::string& item) {
    value<uint64_t>(item.size());
    result_ += item;
  }
  template <typename T>
  void values(const std::vector<T>& items) {
    value<uint64_t>(items.size());
    for (const T& item : items) {
      if constexpr (std::is_same_v<T, std::string>) {
        text(item);
      } else {
        value<T>(item);
      }
    }
  }
  ffi::Bytes bytes() const { return ffi::Bytes(result_); }

 private:
  std::string result_;
};

// Which dimension of the grid or of a block a launch tag names.
struct Extent {
  bool of_block;
  int dimension;
};

Extent extent_of(const std::string& tag) {
  const bool block = tag.rfind("threadIdx.", 0) == 0;
  if ((block || tag.rfind("blockIdx.", 0) == 0) && tag.back() >= 'x' && tag.back() <= 'z') {
    return {block, tag.back() - 'x'};
  }
  TVM_FFI_THROW(RuntimeError) << "OpenCL: kernels cannot be launched with " << tag;
}

void set_argument(cl_kernel kernel, cl_uint index, DLDataType type, ffi::AnyView value) {
  auto set = [&](auto item) {
    HYBRIDC_OPENCL_CALL(clSetKernelArg, kernel, index, sizeof(item), &item);
  };
  if (type.code == kDLOpaqueHandle) {
    auto* buffer = static_cast<Buffer*>(value.cast<void*>());
    return set(buffer == nullptr ? static_cast<cl_mem>(nullptr) : buffer->memory);
  }
  if (type.lanes == 1 && type.code == kDLFloat && type.bits == 32) {
    return set(static_cast<float>(value.cast<double>()));
  }
  if (type.lanes == 1 && type.code == kDLFloat && type.bits == 64) {
    return set(value.cast<double>());
  }
  if (type.lanes == 1 && (type.code == kDLInt || type.code == kDLUInt)) {
    const auto integer = value.cast<int64_t>();
    if (type.bits == 64) return set(integer);
    if (type.bits == 32) return set(static_cast<int32_t>(integer));
    if (type.bits == 16) return set(static_cast<int16_t>(integer));
    if (type.bits == 8) return set(static_cast<int8_t>(integer));
  }
  TVM_FFI_THROW(RuntimeError) << "OpenCL: a kernel's argument has a type that is not passed: "
                              << ffi::DLDataTypeToString(type);
}

class OpenclModule final : public ffi::ModuleObj {
 public:
  OpenclModule(std::string format, Signatures signatures, std::string source)
      : format_(std::move(format)),
        signatures_(std::move(signatures)),
        source_(std::move(source)) {
    if (format_ != "cl") {
      TVM_FFI_THROW(RuntimeError) << "OpenCL: kernels in the form " << format_ << " are not known";
    }
  }

  const char* kind() const final { return "opencl"; }

  int GetPropertyMask() const final {
    return ffi::Module::kBinarySerializable | ffi::Module::kRunnable;
  }

  ffi::Optional<ffi::Function> GetFunction(const ffi::String& name) final {
    auto found = std::find_if(signatures_.begin(), signatures_.end(),
                              [&](const auto& entry) { return entry.first == std::string(name); });
    if (found == signatures_.end()) return std::nullopt;
    std::vector<Extent> extents;
    for (const std::string& tag : found->second.tags) extents.push_back(extent_of(tag));
    // The function keeps the module, and with it the signature, alive.
    auto self = ffi::GetObjectPtr<OpenclModule>(this);
    return ffi::Function::FromPacked(
        [self, signature = &found->second, extents](ffi::PackedArgs args, ffi::Any*) {
          self->launch(*signature, extents, args);
        });
  }

  ffi::Bytes SaveToBytes() const final {
    Writer writer;
    writer.text(format_);
    writer.value<uint64_t>(signatures_.size());
    for (const auto& [key, signature] : signatures_) {
      writer.text(key);
      writer.text(signature.name);
      writer.values(signature.types);
      writer.values(signature.tags);
      writer.values(signature.extra);
    }
    writer.text(source_);
    return writer.bytes();
  }

  ffi::String InspectSource(const ffi::String& format) const final {
    return format.empty() || format == "cl" ? ffi::String(source_) : ffi::String();
  }

 private:
  void launch(const Signature& signature, const std::vector<Extent>& extents,
              ffi::PackedArgs args) {
    const size_t count = signature.types.size();
    std::array<size_t, 3> global{1, 1, 1}, local{1, 1, 1};
    for (size_t index = 0; index < extents.size(); ++index) {
      const auto size = static_cast<size_t>(args[count + index].cast<int64_t>());
      (extents[index].of_block ? local : global)[extents[index].dimension] = size;
    }
    for (int dimension = 0; dimension < 3; ++dimension) global[dimension] *= local[dimension];
    if (global[0] == 0 || global[1] == 0 || global[2] == 0) return;

    const int index = current_device();
    Device& device = opencl::device(index);
    cl_command_queue queue = queue_of(
        index, OpenclApi::get()->GetCurrentStream(tvm::Device{kDLOpenCL, index}));
    Kernel& kernel = program(index).kernel(signature.name);
    cl_event event = nullptr;
    {
      std::lock_guard<std::mutex> lock(kernel.lock);
      for (size_t position = 0; position < count; ++position) {
        set_argument(kernel.handle, static_cast<cl_uint>(position), signature.types[position],
                     args[position]);
      }
      cl_int code = icd().clEnqueueNDRangeKernel(queue, kernel.handle, 3, nullptr, global.data(),
                                                 local.data(), 0, nullptr,
                                                 is_profiling() ? &event : nullptr);
      if (code != CL_SUCCESS) {
        TVM_FFI_THROW(RuntimeError)
            << "OpenCL: the kernel " << signature.name << " in blocks of " << local[0] << " x "
            << local[1] << " x " << local[2] << " cannot run: " << error_name(code);
      }
    }
    if (event != nullptr) device.note(signature.name, event);
  }

  Program& program(int index) {
    std::lock_guard<std::mutex> lock(lock_);
    std::unique_ptr<Program>& built = programs_[index];
    if (built == nullptr) built = std::make_unique<Program>(device(index), source_);
    return *built;
  }

  const std::string format_;
  const Signatures signatures_;
  const std::string source_;
  std::mutex lock_;
  std::map<int, std::unique_ptr<Program>> programs_;
};

ffi::Module make_module(std::string format, Signatures signatures, std::string source) {
  return ffi::Module(ffi::make_object<OpenclModule>(std::move(format), std::move(signatures),
                                                    std::move(source)));
}

ffi::Module load_from_bytes(const ffi::Bytes& bytes) {
  Reader reader(bytes);
  std::string format = reader.text();
  Signatures signatures;
  const auto count = reader.value<uint64_t>();
  for (uint64_t index = 0; index < count; ++index) {
    Signature& signature = signatures.emplace_back(reader.text(), Signature{}).second;
    signature.name = reader.text();
    signature.types = reader.values<DLDataType>();
    signature.tags = reader.values<std::string>();
    signature.extra = reader.values<int32_t>();
  }
  return make_module(std::move(format), std::move(signatures), reader.text());
}

// What TVM's code generator calls in the process that compiles.
ffi::Module create(const ffi::Bytes& code, const ffi::String& format,
                   const ffi::Map<ffi::String, tvm::runtime::FunctionInfo>& functions,
                   const ffi::Map<ffi::String, ffi::String>&) {
  Signatures signatures;
  for (const auto& [key, info] : functions) {
    Signature& signature = signatures.emplace_back(key, Signature{}).second;
    signature.name = info->name;
    for (const DLDataType& type : info->arg_types) signature.types.push_back(type);
    for (const ffi::String& tag : info->launch_param_tags) signature.tags.push_back(tag);
    for (const ffi::Any& extra : info->arg_extra_tags) {
      signature.extra.push_back(static_cast<int32_t>(extra.cast<int64_t>()));
    }
  }
  return make_module(format, std::move(signatures), std::string(code.data(), code.size()));
}

// Times of the kernels of a device since the last call: name -> [calls, nanoseconds].
ffi::Map<ffi::String, ffi::Array<int64_t>> kernel_times(int index) {
  ffi::Map<ffi::String, ffi::Array<int64_t>> result;
  for (const auto& [name, time] : device(index).take_times()) {
    result.Set(name, ffi::Array<int64_t>({time.calls, time.nanoseconds}));
  }
  return result;
}

}  // namespace

}  // namespace hybridc::opencl

TVM_FFI_STATIC_INIT_BLOCK() {
  using namespace hybridc::opencl;
  tvm::ffi::reflection::GlobalDef()
      .def("device_api.opencl",
           []() -> void* { return static_cast<tvm::runtime::DeviceAPI*>(OpenclApi::get()); })
      .def("ffi.Module.load_from_bytes.opencl", load_from_bytes)
      .def("ffi.Module.create.opencl", create)
      .def("hybridc.opencl.kernel_times", kernel_times);
}
