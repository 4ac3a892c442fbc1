// The devices of this machine: contexts, queues, memory, and the times of kernels.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "icd.h"

namespace hybridc::opencl {

// A piece of a device's memory; what TVM holds as the data pointer of a tensor.
struct alignas(64) Buffer {
  cl_mem memory;
};

// A queue of commands. All queues run their commands in the order in which they came, also those
// of different threads, so that memory that one call gives back can be used by the next at once.
struct Stream {
  cl_command_queue queue;
};

// Calls and time of one kernel.
struct KernelTime {
  int64_t calls = 0;
  int64_t nanoseconds = 0;
};

// A device with a context of its own, since an allocation of a shared one is an allocation on all
// of its devices for some drivers. Lives as long as the process.
class Device {
 public:
  Device(cl_platform_id platform, cl_device_id id) : platform_(platform), id_(id) {}

  cl_device_id id() const { return id_; }
  cl_context context();
  cl_command_queue default_queue();

  // A text that tells this device with this driver from any other.
  std::string identity() const;

  std::string text(cl_device_info what) const;
  template <typename T>
  T number(cl_device_info what) const {
    T value{};
    HYBRIDC_OPENCL_CALL(clGetDeviceInfo, id_, what, sizeof(value), &value, nullptr);
    return value;
  }

  Stream* create_stream();

  // Notes a command whose times are to be read; takes the event over.
  void note(const std::string& kernel, cl_event event);
  // Times of the kernels that have run since the last call of it.
  std::map<std::string, KernelTime> take_times();
  // Reads the times of what was noted and has run; called when the queue is empty.
  void read_times();

 private:
  void start();
  cl_command_queue create_queue();

  cl_platform_id platform_;
  cl_device_id id_;
  std::once_flag started_;
  cl_context context_ = nullptr;
  cl_command_queue queue_ = nullptr;
  std::mutex times_lock_;
  std::vector<std::pair<std::string, cl_event>> pending_;
  std::map<std::string, KernelTime> times_;
};

// All devices of all platforms, in the order in which the loader names them; a TVM device's index
// is the place in this list. Empty where there is no loader or no device.
const std::vector<std::unique_ptr<Device>>& devices();

// The device of an index; throws if there is none.
Device& device(int index);

// The device that the calling thread works on.
int current_device();
void set_current_device(int index);

// Whether kernels are timed: the environment variable HYBRIDC_OPENCL_PROFILE.
bool is_profiling();

// The value of an environment variable, or an empty text.
std::string environment(const char* name);

}  // namespace hybridc::opencl
