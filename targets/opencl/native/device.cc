#include "device.h"

#include <tvm/ffi/error.h>

#include <cstdlib>

namespace hybridc::opencl {

namespace {

constexpr size_t kPendingEvents = 4096;  // so many are kept before the queue is waited for

thread_local int thread_device = 0;

std::vector<std::unique_ptr<Device>> find_devices() {
  std::vector<std::unique_ptr<Device>> found;
  const Icd& functions = icd();
  cl_uint platforms = 0;
  if (!functions.found) return found;
  if (functions.clGetPlatformIDs(0, nullptr, &platforms) != CL_SUCCESS) return found;
  std::vector<cl_platform_id> platform_ids(platforms);
  if (functions.clGetPlatformIDs(platforms, platform_ids.data(), nullptr) != CL_SUCCESS) {
    return found;
  }
  for (cl_platform_id platform : platform_ids) {
    cl_uint count = 0;
    if (functions.clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 0, nullptr, &count) != CL_SUCCESS) {
      continue;  // a platform without devices says so with an error
    }
    std::vector<cl_device_id> ids(count);
    HYBRIDC_OPENCL_CALL(clGetDeviceIDs, platform, CL_DEVICE_TYPE_ALL, count, ids.data(), nullptr);
    for (cl_device_id id : ids) found.push_back(std::make_unique<Device>(platform, id));
  }
  return found;
}

}  // namespace

void Device::start() {
  std::call_once(started_, [this] {
    cl_int code = CL_SUCCESS;
    const cl_context_properties properties[] = {
        CL_CONTEXT_PLATFORM, reinterpret_cast<cl_context_properties>(platform_), 0};
    context_ = icd().clCreateContext(properties, 1, &id_, nullptr, nullptr, &code);
    check(code, "clCreateContext");
    queue_ = create_queue();
  });
}

cl_command_queue Device::create_queue() {
  cl_int code = CL_SUCCESS;
  cl_command_queue_properties properties = is_profiling() ? CL_QUEUE_PROFILING_ENABLE : 0;
  cl_command_queue queue = icd().clCreateCommandQueue(context_, id_, properties, &code);
  check(code, "clCreateCommandQueue");
  return queue;
}

cl_context Device::context() {
  start();
  return context_;
}

cl_command_queue Device::default_queue() {
  start();
  return queue_;
}

Stream* Device::create_stream() {
  start();
  return new Stream{create_queue()};
}

std::string Device::text(cl_device_info what) const {
  size_t size = 0;
  HYBRIDC_OPENCL_CALL(clGetDeviceInfo, id_, what, 0, nullptr, &size);
  std::string value(size, '\0');
  HYBRIDC_OPENCL_CALL(clGetDeviceInfo, id_, what, size, value.data(), nullptr);
  return value.c_str();  // up to the terminating zero
}

std::string Device::identity() const {
  size_t size = 0;
  HYBRIDC_OPENCL_CALL(clGetPlatformInfo, platform_, CL_PLATFORM_VERSION, 0, nullptr, &size);
  std::string platform(size, '\0');
  HYBRIDC_OPENCL_CALL(clGetPlatformInfo, platform_, CL_PLATFORM_VERSION, size, platform.data(),
                      nullptr);
  std::string identity = platform.c_str();
  for (cl_device_info what : {CL_DEVICE_VENDOR, CL_DEVICE_NAME, CL_DEVICE_VERSION,
                              CL_DRIVER_VERSION, CL_DEVICE_EXTENSIONS}) {
    identity += "\n" + text(what);
  }
  return identity;
}

void Device::note(const std::string& kernel, cl_event event) {
  bool full = false;
  {
    std::lock_guard<std::mutex> lock(times_lock_);
    pending_.emplace_back(kernel, event);
    full = pending_.size() >= kPendingEvents;
  }
  if (full) {
    HYBRIDC_OPENCL_CALL(clFinish, default_queue());
    read_times();
  }
}

void Device::read_times() {
  std::lock_guard<std::mutex> lock(times_lock_);
  std::vector<std::pair<std::string, cl_event>> unfinished;
  for (auto& [kernel, event] : pending_) {
    cl_ulong start = 0, end = 0;
    auto read = [event = event](cl_profiling_info what, cl_ulong* value) {
      return icd().clGetEventProfilingInfo(event, what, sizeof(*value), value, nullptr);
    };
    if (read(CL_PROFILING_COMMAND_START, &start) || read(CL_PROFILING_COMMAND_END, &end)) {
      unfinished.emplace_back(std::move(kernel), event);
      continue;
    }
    KernelTime& time = times_[kernel];
    time.calls += 1;
    time.nanoseconds += static_cast<int64_t>(end - start);
    icd().clReleaseEvent(event);
  }
  pending_ = std::move(unfinished);
}

std::map<std::string, KernelTime> Device::take_times() {
  if (queue_ != nullptr) HYBRIDC_OPENCL_CALL(clFinish, queue_);
  read_times();
  std::lock_guard<std::mutex> lock(times_lock_);
  return std::exchange(times_, {});
}

const std::vector<std::unique_ptr<Device>>& devices() {
  static const auto* found = new std::vector<std::unique_ptr<Device>>(find_devices());
  return *found;
}

Device& device(int index) {
  const auto& found = devices();
  if (index < 0 || index >= static_cast<int>(found.size())) {
    TVM_FFI_THROW(RuntimeError) << "there is no OpenCL device " << index << "; this machine has "
                                << found.size();
  }
  return *found[index];
}

int current_device() { return thread_device; }

void set_current_device(int index) {
  device(index);
  thread_device = index;
}

bool is_profiling() {
  static const bool profiling = [] {
    std::string value = environment("HYBRIDC_OPENCL_PROFILE");
    return !value.empty() && value != "0";
  }();
  return profiling;
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace hybridc::opencl
